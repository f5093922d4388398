"""What is generated from the manifest's models: the CustomResourceDefinition and the reference page."""
