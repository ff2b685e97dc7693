"""What the campaign found, each with the test that keeps it mended: {part: {test: what was wrong}}.

A test is named as pytest does, `file::function`, from the root of the repository.
"""

FOUND: dict[str, dict[str, str]] = {
    "calls": {
        "tests/test_checks.py::test_what_is_no_number_is_named": "bytes were taken for numbers",
        "tests/test_checks.py::test_what_is_no_alpha_is_named": "an alpha of two numbers was a raw error",
        "tests/test_checks.py::test_what_names_no_file_is_named": "a path with a 0 byte in it was a raw error",
        "tests/test_checks.py::test_what_is_no_path_is_named": "what is no path was a raw error",
        "tests/test_checks.py::test_weights_that_are_no_numbers_are_named": "weights of text were a raw error",
        "tests/test_checks.py::test_what_are_no_widths_is_named": "an empty mapping was taken for widths",
        "tests/test_checks.py::test_whole_numbers_of_either_sign": (
            "class axes, positions and labels to leave out were looked at when it was too late, or never"
        ),
        "tests/torture/test_campaign.py::test_a_part_in_small_finds_nothing": (
            "of 9,521 bad calls 1,569 ended in a raw error, 827 in an answer and 18 in a long run: flags, seeds, "
            "masks, counts, temperatures, distributions and models that nobody had checked"
        ),
    },
    "commands": {
        "tests/test_cli.py::test_nonsense_starts_nothing": (
            "a traceback for `--shape -1,4` and `--passes inf`; long runs begun by nan, an empty list or 99999999 jobs"
        ),
        "tests/test_cli.py::test_a_module_of_the_user_that_fails_is_one_line": "a traceback for a module that fails",
        "tests/tabular/test_fit_table.py::test_a_target_that_is_the_group_is_refused": (
            "the target as group began a long fit"
        ),
        "tests/test_checkpoint.py::test_a_place_below_a_file_is_refused_before_anything_is_done": (
            "a fit began whose model could not be written: its place lay below a file"
        ),
        "tests/tabular/test_tabular_files.py::test_a_compressed_table_that_is_cut_off_is_named": (
            "a compressed table that was cut off ended as if Ctrl-C had been pressed"
        ),
    },
    "downloads": {
        "tests/data/test_download.py::test_a_server_that_sends_more_than_the_file_can_have": (
            "a server that never stops filled the disk: 4.4 GB in 8 s"
        ),
        "tests/data/test_download.py::test_a_server_that_brings_next_to_nothing_is_left": (
            "one byte every half second was waited for without end"
        ),
        "tests/data/test_download.py::test_a_head_that_does_not_end_is_left": "a head sent letter by letter, the same",
        "tests/data/test_download.py::test_odd_answers_are_one_sentence": "raw errors for odd lengths and redirections",
        "tests/data/test_sources.py::test_an_archive_that_unpacks_to_more_than_a_table_has_is_refused_unread": (
            "an archive of 1.4 MB took 2.7 GB"
        ),
        "tests/data/test_sources.py::test_images_that_unpack_to_more_than_they_are_are_refused": "the same, for images",
        "tests/data/test_sources.py::test_arrays_that_say_they_are_huge_are_named": (
            "a header that claims terabytes was a MemoryError"
        ),
        "tests/data/test_sources.py::test_odd_archives_are_named": "raw errors for odd zip files",
        "tests/data/test_sources.py::test_an_archive_is_read_under_the_names_of_a_download": (
            "the second of two downloads of `year` at once refused its own file"
        ),
    },
    "folders": {
        "tests/tabular/test_table_model.py::test_one_changed_number_of_the_card_is_said": (
            "one changed byte of card.json went unseen: what is unusual was told by another threshold"
        ),
        "tests/tabular/test_table_model.py::test_the_card_of_another_model_is_said": (
            "a kill between the model and its card left a model with no card, or with another's"
        ),
        "tests/estimators/test_estimators_whole.py::test_a_folder_says_what_is_wrong_with_it": (
            "a forged number of columns allocated gigabytes before it was refused"
        ),
        "tests/estimators/test_estimators_whole.py::test_names_in_a_folder_are_text": (
            "forged names of columns were a raw error when rows were predicted"
        ),
        "tests/test_checkpoint.py::test_layers_with_odd_arguments_are_refused": "a forged rate of nan was loaded",
    },
    "faults": {
        "tests/experiments/test_results.py::test_what_a_killed_writer_left_goes": (
            "a killed writer of results left its half of a file for ever"
        ),
        "tests/test_spread.py::test_a_worker_of_this_machine_that_dies_is_a_sentence": (
            "a traceback where a process of `--jobs` was killed"
        ),
    },
    "numbers": {
        "tests/test_random_numbers.py::test_keys_collide_as_often_as_chance_has_it_in_every_32_bits": (
            "passes drawn by themselves had streams of 32 bits: one in a thousand of a run of a million steps was "
            "another step's; held-out rows of a run had the masks of the steps of the next seed"
        ),
        "tests/training/test_fitting.py::test_a_precision_of_a_perfect_fit_is_held_where_the_digits_end_and_said": (
            "a learned precision grew to 1e38 without a word where a target was fitted exactly"
        ),
    },
}
