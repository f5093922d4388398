"""The page of a run (`polyrl.page`), made of its folder.

page  of a run's folder, and into a file
live  for a browser, as the run goes on
"""
