"""The manager's keys, password, sessions and audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "manager_keys",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("prefix", sa.String(40), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("last_used_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_manager_keys"),
        sa.UniqueConstraint("name", name="uq_manager_keys_name"),
        sa.UniqueConstraint("prefix", name="uq_manager_keys_prefix"),
    )
    op.create_table(
        "manager_passwords",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("changed_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_manager_passwords"),
    )
    op.create_table(
        "manager_sessions",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("seen_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_manager_sessions"),
        sa.UniqueConstraint("digest", name="uq_manager_sessions_digest"),
    )
    op.create_table(
        "manager_audit",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("detail", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_manager_audit"),
    )


def downgrade() -> None:
    for table in ("manager_audit", "manager_sessions", "manager_passwords", "manager_keys"):
        op.drop_table(table)
