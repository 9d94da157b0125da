"""`dynaxx tune` and `dynaxx retune`: find the sparsest policy that keeps quality, and renew it."""
