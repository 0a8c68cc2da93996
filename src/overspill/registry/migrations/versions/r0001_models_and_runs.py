"""Models and runs."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None

# Written out, not taken from the package: a migration must not change when the package does.
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("max_model_len", sa.BigInteger),
        sa.Column("gpu_memory", sa.BigInteger),
        sa.Column("ram", sa.BigInteger),
        sa.Column("offload_ram", sa.BigInteger),
        sa.Column("weights_ram", sa.BigInteger),
        sa.Column("dtype", sa.Text),
        sa.Column("kv_cache_dtype", sa.Text),
        sa.Column("max_num_seqs", sa.BigInteger),
        sa.Column("max_num_batched_tokens", sa.BigInteger),
        sa.Column("enforce_eager", sa.Boolean),
        sa.Column("vllm_args", JSON, nullable=False),
        sa.Column("ttl", sa.BigInteger),
        sa.Column("notes", sa.Text),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_models"),
        sa.UniqueConstraint("name", name="uq_models_name"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("model_id", sa.Integer),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("settings", JSON),
        sa.Column("argv", JSON, nullable=False),
        sa.Column("environment", JSON, nullable=False),
        sa.Column("versions", JSON, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.BigInteger),
        sa.Column("process", sa.Text),
        sa.Column("log_file", sa.Text),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("ended_at", TIME),
        sa.Column("end", sa.Text),
        sa.Column("exit_code", sa.BigInteger),
        sa.Column("detail", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name="fk_runs_model_id", ondelete="SET NULL"),
    )
    op.create_index("ix_runs_model_id", "runs", ["model_id"])
    op.create_index("ix_runs_model", "runs", ["model"])


def downgrade() -> None:
    op.drop_table("runs")
    op.drop_table("models")
