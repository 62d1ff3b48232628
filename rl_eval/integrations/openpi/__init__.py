"""openpi: policies on a server, by openpi's websocket protocol."""
