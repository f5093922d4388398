"""All that calls the user's functions: loading them, rewards, episodes with environments, deadlines."""
