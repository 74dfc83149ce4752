"""Files that a fuzzer has made, given to whatever reads files of others.

`targets` has the readers: each makes small valid files with the real writers and reads what was
made of them, in all the ways in which the commands do. `mutations` are hypothesis strategies that
change valid files: bits, integers, words, pieces; in JSON also values, types, keys and depth.
`child` is the process in which they are read: a crash, 10 s of its own time, 2 GiB, an exception
that is no sentence (other than ours, `ValueError`, `OSError`), and anything that Python opens,
renames, starts or unpickles outside of the folder of the inputs is trouble. hypothesis then looks
for the smallest input with that trouble.

A sample runs always, the same every time; `-m slow` gives 10,000 new inputs to the readers of
manifests, shards, tables and annotations, and fewer to those that take longer. What was found has a
test of its own beside those of the reader.
"""
