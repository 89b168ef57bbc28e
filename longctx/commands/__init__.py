"""Commands of the command line, one module each: `add_arguments(parser)` and `run(arguments) ->
exit status`."""
