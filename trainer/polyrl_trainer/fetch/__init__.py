"""What runs in a trainer's pod before the trainer: it fetches the model and the rows that the manifest names by a URI,
or a model by its name on a Hub, into a cache that the trainer reads. It alone has the credentials of
`recipe.model.secretRef` and `recipe.data.secretRef`.
"""
