"""A model's connector options, for KV in RAM."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("models", sa.Column("kv_options", sa.Text))


def downgrade() -> None:
    op.drop_column("models", "kv_options")
