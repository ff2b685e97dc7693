"""The paper's experiments, and the demo: a frozen config, run(config) -> results, main()."""
