"""A run as one HTML file: what it learned, where its time went, what its fleet went through, samples to read.

    contents  what the page shows, read from a run's folder, live or finished
    charts    its pictures, as SVG
    page      both, in the template `page.html`

The file holds no script and loads nothing: it opens without a network, in a mail or in a browser that trusts nobody.
"""
