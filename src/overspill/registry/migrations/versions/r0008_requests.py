"""Requests through the manager's gateway."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "manager_requests",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("http_status", sa.Integer),
        sa.Column("prompt_tokens", sa.Integer),
        sa.Column("completion_tokens", sa.Integer),
        sa.Column("cached_tokens", sa.Integer),
        sa.Column("spilled_tokens", sa.Integer),
        sa.Column("waited_s", sa.Double, nullable=False),
        sa.Column("ttft_s", sa.Double),
        sa.Column("duration_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_manager_requests"),
    )


def downgrade() -> None:
    op.drop_table("manager_requests")
