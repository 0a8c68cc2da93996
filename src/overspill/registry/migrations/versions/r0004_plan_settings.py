"""Settings of a plan: the share of GPU memory, and full-length requests at once."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("models", sa.Column("gpu_memory_utilization", sa.Double))
    op.add_column("models", sa.Column("at_once", sa.BigInteger))


def downgrade() -> None:
    for column in ("at_once", "gpu_memory_utilization"):
        op.drop_column("models", column)
