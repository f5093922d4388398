"""What `make release` does: refuse a tree that is no release, build everything twice, compare the bytes, sum them up;
and what signs the sums, and verifies them.

`rules` decides whether a tree may be released, `surfaces` finds what users of the version before would miss,
`lock` holds the hashes of what is installed, `artifacts` builds one folder of files from one export of a commit,
`signatures` signs and verifies such a folder, `provenance` the chart in it as Helm does, `images` what a registry has
of it as admission does, and `__main__` is the command.
"""
