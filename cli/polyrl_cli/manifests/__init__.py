"""From a YAML file to a valid job, or to every fault at once, each with its line.

    yaml_source   the file's plain data, and the line of each field
    messages      what is wrong with a field, as a sentence; which field a misspelt one probably means
    file_checks   what a manifest names on disk
    load          all of these in order, with `--set PATH=VALUE`: `load_manifest`, `check_files`, `validation_report`
    starter       `polyrl init`: a first job to change
    crd           the CustomResourceDefinition as YAML

The rest of the command line imports `load`.
"""
