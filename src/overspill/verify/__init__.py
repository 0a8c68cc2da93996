"""`overspill verify`: a proof, on the user's own machine, that KV in RAM changes no token."""
