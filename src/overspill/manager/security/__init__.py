"""Who may reach the manager, what a browser may be made to do, and what a client may cost."""
