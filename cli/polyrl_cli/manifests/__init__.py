"""From a YAML file to a valid job.

Reading with line numbers, overrides, checks of files, and sentences about what is wrong.
"""
