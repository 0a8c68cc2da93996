"""The store between machines: Mooncake Store, below RAM, shared by the engines that name the same master."""
