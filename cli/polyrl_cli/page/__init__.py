"""The page of a run (`polyrl.page`), made of its folder."""
