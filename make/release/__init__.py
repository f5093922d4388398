"""What `make release` does: refuse a tree that is no release, build everything twice, compare the bytes, sum them up.

`rules` decides whether a tree may be released, `surfaces` finds what users of the version before would miss,
`artifacts` builds one folder of files from one export of a commit, and `__main__` is the command.
"""
