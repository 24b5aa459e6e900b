"""`rankscope prepare`: documents of text, JSONL and Parquet files into sharded token files."""
