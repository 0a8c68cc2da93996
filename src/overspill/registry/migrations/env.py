"""Alembic's environment script, which runs migrations on the caller's connection."""

from alembic import context

from overspill.registry.database import VERSION_TABLE

# The caller owns the transaction, so that locking, checking and migrating are atomic.
context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
context.run_migrations()
