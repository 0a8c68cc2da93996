"""The manager's web side: pages and API on one port with the gateway, and the guards in front of them."""
