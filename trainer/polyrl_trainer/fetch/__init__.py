"""What runs in a trainer's pod before the trainer: it fetches the model that the manifest names by a URI or by its name
on a Hub, into a cache that the trainer reads. It alone has the credentials of `recipe.model.secretRef`.
"""
