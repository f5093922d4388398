"""The manifest: `PolyRLJob`, polyrl.dev/v1alpha1, as frozen values. Read next: `job`, then `recipe`."""
