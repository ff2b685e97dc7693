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
        "tests/estimators/test_estimators_settings.py::test_passes_of_predictions_are_checked_when_they_are_used": (
            "a forged number of passes, 2^31, was set out on"
        ),
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
    "service": {
        "tests/serve/test_connection.py::test_what_is_sent_on_behind_a_refusal_is_not_read_without_end": (
            "behind a refusal a body was read on without end: 10 GB in seconds"
        ),
        "tests/serve/test_connection.py::test_who_says_nothing_is_left": "a client that said nothing was never left",
        "tests/serve/test_connection.py::test_a_head_that_does_not_come_is_waited_for_no_longer_than_told": (
            "a head sent letter by letter was waited for without end"
        ),
        "tests/serve/test_connection.py::test_a_body_that_does_not_come_is_told_and_left": (
            "a body sent letter by letter was refused, and its connection kept"
        ),
        "tests/serve/test_connection.py::test_who_does_not_take_answers_is_left": (
            "answers that nobody took were kept without end"
        ),
        "tests/serve/test_connection.py::test_an_idle_connection_is_closed_even_behind_a_refused_body": (
            "an idle connection was kept for ever, once a body had come behind its answer"
        ),
        "tests/serve/test_connection.py::test_too_many_clients_are_sent_away_and_come_back": (
            "connections had no limit but that of the system"
        ),
        "tests/serve/test_connection.py::test_bytes_of_all_requests_together_are_bounded": (
            "bodies had a limit each, and all of them together none"
        ),
        "tests/serve/test_connection.py::test_a_length_told_in_two_ways_is_refused_and_nothing_behind_it_is_read": (
            "a length told in two ways was taken: behind a proxy that goes by the other one, a way to smuggle requests"
        ),
        "tests/serve/test_messages.py::test_what_has_no_end_is_one_error": (
            "a body of 300,000 names that nobody knows held up all others for 3 s"
        ),
        "tests/serve/test_serve_running.py::test_bodies_are_read_without_a_search_through_all_memory": (
            "so did a million empty lines: memory was searched through again and again"
        ),
        "tests/serve/test_connection.py::test_what_is_no_http_gets_a_sentence": (
            "what is no HTTP got a text that was no JSON, and a line in the log each time"
        ),
        "tests/serve/test_connection.py::test_a_wrong_chunk_behind_an_answer_is_no_error_of_ours": (
            "a wrong chunk behind an answer was a traceback in the log"
        ),
        "tests/serve/test_app.py::test_nobody_is_sent_elsewhere": (
            "a slash too many was answered by a redirection to the host that the client had named"
        ),
        "tests/serve/test_app.py::test_a_key_that_no_header_can_hold_is_refused": (
            "a key that no client can send was taken for one"
        ),
        "tests/test_cli_tables.py::test_a_key_that_is_set_and_empty_is_no_open_door": (
            "an empty BBALPHA_API_KEY opened the service to all"
        ),
    },
    "fuzz": {
        "tests/exploration/test_loop.py::test_a_forged_loop_is_refused_in_a_sentence": (
            "a forged state of an Explorer was a raw error"
        ),
        "tests/exploration/test_loop.py::test_a_loop_that_nests_without_end_is_damaged": (
            "brackets without end in it, the same"
        ),
        "tests/test_detection.py::test_any_changed_byte_is_noticed": "and in a detector's file",
        "tests/tabular/test_tabular_files.py::test_a_parquet_file_with_changed_bytes_is_a_table_or_one_sentence": (
            "damaged Parquet was a raw error"
        ),
        "tests/tabular/test_tabular_files.py::test_what_only_says_that_it_is_compressed_is_named": (
            "text under the name of a compressed table, the same"
        ),
    },
}
