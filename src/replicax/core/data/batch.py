"""A batch of fixed size: the user's rows, their mask, and values without rows."""



