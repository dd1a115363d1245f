"""Stack dumps as py-spy, faulthandler and debuggers write them, into frames. Pure."""
