"""Models to keep loaded, and models to start with the manager."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("models", sa.Column("keep", sa.Boolean))
    op.add_column("models", sa.Column("preload", sa.Boolean))


def downgrade() -> None:
    for column in ("preload", "keep"):
        op.drop_column("models", column)
