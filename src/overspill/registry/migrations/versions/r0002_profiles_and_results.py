"""Profiles and benchmark results."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "profiles",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("non_torch_bytes", sa.BigInteger, nullable=False),
        sa.Column("activation_bytes", sa.BigInteger, nullable=False),
        sa.Column("graph_bytes", sa.BigInteger, nullable=False),
        sa.Column("context_bytes", sa.BigInteger, nullable=False),
        sa.Column("h2d_bytes_per_second", sa.BigInteger),
        sa.Column("d2h_bytes_per_second", sa.BigInteger),
        sa.Column("measured_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_profiles"),
        sa.UniqueConstraint("fingerprint", name="uq_profiles_fingerprint"),
    )
    op.create_table(
        "results",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("benchmark", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("experiment", sa.Text),
        sa.Column("label", sa.Text),
        sa.Column("repeat", sa.BigInteger),
        sa.Column("is_complete", sa.Boolean, nullable=False),
        sa.Column("config", JSON, nullable=False),
        sa.Column("argv", JSON, nullable=False),
        sa.Column("environment", JSON, nullable=False),
        sa.Column("versions", JSON, nullable=False),
        sa.Column("gpu", sa.Text),
        sa.Column("driver", sa.Text),
        sa.Column("plan", JSON),
        sa.Column("git_revision", sa.Text),
        sa.Column("metrics", JSON, nullable=False),
        sa.Column("run_id", sa.Integer),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("saved_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_results"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_results_run_id", ondelete="SET NULL"),
    )
    for column in ("benchmark", "model", "experiment", "run_id"):
        op.create_index(f"ix_results_{column}", "results", [column])


def downgrade() -> None:
    op.drop_table("results")
    op.drop_table("profiles")
