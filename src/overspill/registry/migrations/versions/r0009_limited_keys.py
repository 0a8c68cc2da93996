"""Keys that expire, and keys for some models only."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = "0008"

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("manager_keys", sa.Column("expires_at", sa.DateTime(timezone=True)))
    op.add_column("manager_keys", sa.Column("models", JSON))


def downgrade() -> None:
    for column in ("models", "expires_at"):
        op.drop_column("manager_keys", column)
