"""Reports: pages of results, comparisons, cross-play and folders of runs, for a terminal, a notebook and a browser.

A page is data; three renderers show the same page. Imported by ``ope/``, ``cli/`` and everything above.
"""
