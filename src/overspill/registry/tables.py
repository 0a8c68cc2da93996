"""The registry's tables. Migrations make them; a test holds the two together."""

from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy import Double, ForeignKey, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from overspill.registry.model_settings import ModelSettings
from overspill.registry.schema import Base, Json


class ModelRow(Base):
    __tablename__ = "models"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(String(200), unique=True)
    source: Mapped[str] = mapped_column(Text)
    max_model_len: Mapped[int | None]
    gpu_memory: Mapped[int | None]
    gpu_memory_utilization: Mapped[float | None] = mapped_column(Double)
    ram: Mapped[int | None]
    offload_ram: Mapped[int | None]
    weights_ram: Mapped[int | None]
    dtype: Mapped[str | None] = mapped_column(Text)
    kv_cache_dtype: Mapped[str | None] = mapped_column(Text)
    kv_options: Mapped[str | None] = mapped_column(Text)
    at_once: Mapped[int | None]
    max_num_seqs: Mapped[int | None]
    max_num_batched_tokens: Mapped[int | None]
    enforce_eager: Mapped[bool | None]
    vllm_args: Mapped[list[str]]
    ttl: Mapped[int | None]
    keep: Mapped[bool | None]
    preload: Mapped[bool | None]
    notes: Mapped[str | None] = mapped_column(Text)
    version: Mapped[int] = mapped_column()
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]

    # Every UPDATE and DELETE then asks for the version that was read, and counts it up.
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 (SQLAlchemy's own declaration)

    @property
    def settings(self) -> ModelSettings:
        values = {field.name: getattr(self, field.name) for field in fields(ModelSettings)}
        return ModelSettings(**{**values, "vllm_args": tuple(self.vllm_args)})


class RunRow(Base):
    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    # A run outlives its model, so the name is kept as well.
    model_id: Mapped[int | None] = mapped_column(Integer, ForeignKey("models.id", ondelete="SET NULL"), index=True)
    model: Mapped[str] = mapped_column(Text, index=True)
    settings: Mapped[dict[str, Any] | None] = mapped_column(Json)
    argv: Mapped[list[str]]
    environment: Mapped[dict[str, str]]
    versions: Mapped[dict[str, str]]
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int | None]
    process: Mapped[str | None] = mapped_column(Text)
    log_file: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    end: Mapped[str | None] = mapped_column(Text)
    exit_code: Mapped[int | None]
    detail: Mapped[str | None] = mapped_column(Text)


class ProfileRow(Base):
    __tablename__ = "profiles"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    fingerprint: Mapped[str] = mapped_column(Text, unique=True)
    non_torch_bytes: Mapped[int]
    activation_bytes: Mapped[int]
    graph_bytes: Mapped[int]
    context_bytes: Mapped[int]
    h2d_bytes_per_second: Mapped[int | None]
    d2h_bytes_per_second: Mapped[int | None]
    measured_at: Mapped[datetime]


class ResultRow(Base):
    __tablename__ = "results"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    benchmark: Mapped[str] = mapped_column(Text, index=True)
    model: Mapped[str] = mapped_column(Text, index=True)
    experiment: Mapped[str | None] = mapped_column(Text, index=True)
    label: Mapped[str | None] = mapped_column(Text)
    repeat: Mapped[int | None]
    is_complete: Mapped[bool]
    config: Mapped[dict[str, Any]]
    argv: Mapped[list[str]]
    environment: Mapped[dict[str, str]]
    versions: Mapped[dict[str, str]]
    gpu: Mapped[str | None] = mapped_column(Text)
    driver: Mapped[str | None] = mapped_column(Text)
    plan: Mapped[dict[str, Any] | None] = mapped_column(Json)
    git_revision: Mapped[str | None] = mapped_column(Text)
    metrics: Mapped[dict[str, Any]]
    run_id: Mapped[int | None] = mapped_column(Integer, ForeignKey("runs.id", ondelete="SET NULL"), index=True)
    started_at: Mapped[datetime]
    saved_at: Mapped[datetime]


class KeyRow(Base):
    __tablename__ = "manager_keys"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    prefix: Mapped[str] = mapped_column(String(40), unique=True)
    digest: Mapped[str] = mapped_column(String(64))
    scope: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    last_used_at: Mapped[datetime | None]


class PasswordRow(Base):
    __tablename__ = "manager_passwords"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    hash: Mapped[str] = mapped_column(Text)
    changed_at: Mapped[datetime]


class SessionRow(Base):
    __tablename__ = "manager_sessions"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    who: Mapped[str] = mapped_column(Text)
    address: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    seen_at: Mapped[datetime]


class AuditRow(Base):
    __tablename__ = "manager_audit"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[datetime]
    who: Mapped[str] = mapped_column(Text)
    action: Mapped[str] = mapped_column(Text)
    subject: Mapped[str] = mapped_column(Text)
    address: Mapped[str] = mapped_column(Text)
    outcome: Mapped[str] = mapped_column(Text)
    detail: Mapped[str | None] = mapped_column(Text)
