"""One script a peer, run by that peer's own interpreter: nothing here imports tuneline or another peer.

python SCRIPT run CORPUS.jsonl FOLDER      what is measured; the working directory is FOLDER
python SCRIPT removed CORPUS.jsonl FOLDER  not measured: prints the numbers of the removed documents as a JSON list
"""
