"""The ten probing tasks of SentEval, trained end to end."""
