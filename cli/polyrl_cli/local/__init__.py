"""A run as processes on this machine.

    run             `polyrl run`: a manifest in, a folder and an exit code out
    runner          the loop: observe, plan, act, until the planner names the end
    process_fleet   workers as processes
    manager         the client of the run's manager
    chaos           faults on those processes, and the socket by which `polyrl chaos` asks for one
    run_folder      the folder of a run and what lies in it

`inspection` imports `run_folder` and `manager`.
"""
