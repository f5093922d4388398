"""Workers of one run as processes on one machine: which of them there should be. The shell is `polyrl_cli.local`."""
