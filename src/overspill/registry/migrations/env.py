"""How migrations run; Alembic loads this."""

from alembic import context

from overspill.registry.database import VERSION_TABLE

# The transaction around it is the caller's, so that locking, checking and migrating are one.
context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
context.run_migrations()
