"""`thinwire bench`: codecs, link and allreduces of this machine or cluster, before any code is
changed."""
