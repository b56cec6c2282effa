"""The wire: servicers, requests, pages, events, the error table, and the assembled service."""
