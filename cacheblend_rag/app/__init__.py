"""What a newcomer runs: the documents that come with the package."""
