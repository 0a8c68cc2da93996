"""The gateway: OpenAI's API on the manager's port, in front of whichever engines run."""
