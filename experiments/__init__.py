"""The paper's tables and figures, one file each: ``python -m experiments --help``.

An experiment is a module with three functions. ``configs(quick)`` lists its trials, each a plain dictionary with everything
that decides its outcome, seeds included. ``run(config, device)`` is a pure function from that to a JSON record.
``draw(records, folder)`` makes tables and figures from records alone. The frame does the rest: it runs the trials that have
no record yet, in this process, in several, or on a Ray cluster.
"""
