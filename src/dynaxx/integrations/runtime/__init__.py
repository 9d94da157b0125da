"""What every engine adapter shares: paged layers, counting, guarding, background work."""
