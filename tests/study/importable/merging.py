"""Merges that tests ask for; writers merge by themselves where there are many parts."""

from mup_tpu.store import tables


def merge_all(store):
    for table in ("runs", "curves"):
        names = tables.part_names(store.folder, table)
        if len(names) > 1:
            tables.merge(store.folder, table, store.own_columns, names)
