"""What nodes have done before, what that makes of each, and what is done about suspects: quarantine and tests."""
