"""The manifest: `PolyRLJob`, polyrl.dev/v1alpha1, as frozen values. Start with `job`, then `recipe`.

job ── recipe            what is learned; nothing in it knows where it runs; its longer sections are in `parts`
    ├─ rollout           what generates
    ├─ spec, cluster     where it runs: devices, pods, networks, failures
    ├─ scaling           how many rollouts, and what they cost
    ├─ rules             what must hold between fields, in Python and in CEL from one list
    ├─ status            what the operator reports
    └─ schema            the CustomResourceDefinition and the reference page, generated from these models
"""
