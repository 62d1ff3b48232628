"""Reports: pages of results, comparisons, cross-play and run folders, for a terminal, a notebook and a browser.

A page is data. Three renderers show the same page.
"""
