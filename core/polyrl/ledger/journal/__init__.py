"""How events and states look in bytes, and in which pages they are kept; files are the manager's."""
