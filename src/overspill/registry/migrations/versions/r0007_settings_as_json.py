"""A model's settings as one JSON column, so that a new setting needs no migration."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
COLUMNS: dict[str, Any] = {
    "source": sa.Text(),
    "max_model_len": sa.BigInteger(),
    "gpu_memory": sa.BigInteger(),
    "gpu_memory_utilization": sa.Double(),
    "ram": sa.BigInteger(),
    "offload_ram": sa.BigInteger(),
    "weights_ram": sa.BigInteger(),
    "dtype": sa.Text(),
    "kv_cache_dtype": sa.Text(),
    "kv_options": sa.Text(),
    "at_once": sa.BigInteger(),
    "max_num_seqs": sa.BigInteger(),
    "max_num_batched_tokens": sa.BigInteger(),
    "enforce_eager": sa.Boolean(),
    "vllm_args": JSON,
    "ttl": sa.BigInteger(),
    "keep": sa.Boolean(),
    "preload": sa.Boolean(),
    "notes": sa.Text(),
}
# SQLite can add a NOT NULL column only with a default.
EMPTY = {"source": "", "vllm_args": "[]"}
MODELS = sa.table(
    "models", sa.column("id", sa.Integer), sa.column("settings", JSON),
    *(sa.column(name, kind) for name, kind in COLUMNS.items()),
)  # fmt: skip


def upgrade() -> None:
    op.add_column("models", sa.Column("settings", JSON, nullable=False, server_default="{}"))
    connection = op.get_bind()
    for row in connection.execute(sa.select(MODELS)).mappings().all():
        kept = {name: row[name] for name in COLUMNS if row[name] not in (None, [])}
        connection.execute(sa.update(MODELS).where(MODELS.c.id == row["id"]).values(settings=kept))
    for name in COLUMNS:
        op.drop_column("models", name)


def downgrade() -> None:
    for name, kind in COLUMNS.items():
        is_needed = name in EMPTY
        op.add_column("models", sa.Column(name, kind, nullable=not is_needed, server_default=EMPTY.get(name)))
    connection = op.get_bind()
    for row in connection.execute(sa.select(MODELS.c.id, MODELS.c.settings)).all():
        known = {"vllm_args": [], **{name: value for name, value in row.settings.items() if name in COLUMNS}}
        connection.execute(sa.update(MODELS).where(MODELS.c.id == row.id).values(**known))
    op.drop_column("models", "settings")
