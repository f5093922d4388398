"""What is generated from the manifest's models: `crd`, the CustomResourceDefinition, and `reference_page`, the fields'
page of the docs.

Imports the models and their rules; imported by the command line and by tests, by nothing that runs a job.
"""
