"""A run as one HTML page: what it learned, where its time went, what its fleet went through, samples to read.

    contents  what the page shows, from what is known of a run
    charts    its pictures, as SVG
    page      both, in the template `page.html`

The command line makes it of a run's folder, a manager of what it remembers. It holds no script and loads nothing:
it opens without a network, in a mail or in a browser that trusts nobody.
"""
